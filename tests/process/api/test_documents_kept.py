"""Documents over HTTP with an engine that remembers: acknowledged is durable, and the next server has them."""

from __future__ import annotations

from concurrent.futures import Future

import httpx
import msgspec

from api_world import MODEL, SCRIPT_TEXT, says, serve
from fake_engine import FakeEngine
from memserve.api.openai.documents import DocumentMemory, Documents
from memserve.protocol.records import DocumentDropped, DocumentPut


class RememberingFake(FakeEngine):
    """Keeps records in a list, as long as its disk has room."""

    def __init__(self) -> None:
        super().__init__(says(SCRIPT_TEXT))
        self.records: list[DocumentPut | DocumentDropped] = []
        self.known: tuple[DocumentPut, ...] = ()
        self.has_room = True

    def stored_documents(self) -> tuple[DocumentPut, ...]:
        return self.known

    def write_record(self, record: DocumentPut | DocumentDropped) -> Future[bool]:
        answer: Future[bool] = Future()
        if self.has_room:
            self.records.append(record)
        answer.set_result(self.has_room)
        return answer


def test_acknowledged_documents_survive_a_restart() -> None:
    texts = {"manual": "The capital of France is hello hello.", "other": "hello", "gone": "hello hello"}
    engine = RememberingFake()
    with serve(engine) as world:
        for name, text in texts.items():
            assert httpx.put(f"{world.url}/v1/documents/{name}", json={"text": text}, timeout=30).status_code == 201
        assert httpx.delete(f"{world.url}/v1/documents/gone", timeout=30).status_code == 200
        cards = httpx.get(f"{world.url}/v1/documents", timeout=30).json()["data"]
    assert [type(record) for record in engine.records] == [DocumentPut] * 3 + [DocumentDropped]
    after = RememberingFake()
    late = msgspec.structs.replace(engine.records[1], document_id="late", expires_unix_ns=1)
    after.known = (*engine.records[:2], late)
    with serve(after) as world:
        found = httpx.get(f"{world.url}/v1/documents", timeout=30).json()["data"]
        for card, known in zip(found, cards, strict=True):
            assert card.pop("expires_in_s") < known.pop("expires_in_s")
            assert card == known
        question = {"model": MODEL, "document": "manual", "messages": [{"role": "user", "content": "Where?"}]}
        assert httpx.post(f"{world.url}/v1/chat/completions", json=question, timeout=30).status_code == 200
    assert after.records == [DocumentDropped("", "late")]


def test_a_document_that_cannot_be_kept_is_not_acknowledged() -> None:
    engine = RememberingFake()
    with serve(engine) as world:
        url = f"{world.url}/v1/documents/manual"
        assert httpx.put(url, json={"text": "hello"}, timeout=30).status_code == 201
        engine.has_room = False
        for answer in (httpx.put(url, json={"text": "is"}, timeout=30), httpx.delete(url, timeout=30)):
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "not_durable"
            assert answer.headers["retry-after"] == "5"


def test_an_engine_without_memory_keeps_nothing() -> None:
    documents = Documents()
    DocumentMemory(FakeEngine(says(SCRIPT_TEXT))).restore_documents(documents)
    assert documents.list_documents("") == []
