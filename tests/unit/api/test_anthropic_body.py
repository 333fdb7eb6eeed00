"""Bodies of Anthropic's Messages API as chats: whatever a client sends is a chat, or an error that names its fault."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from memserve.api.anthropic.body import BREAKPOINTS_MAX, MARKS, Breakpoints, MessagesBody, chat_of
from memserve.api.http.errors import ApiError
from memserve.api.openai.request.messages import check_messages
from memserve.api.openai.request.schema import body_of

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text("ab \n", max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=6,
)
CONTROL = st.sampled_from(
    [{"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}, {"type": "ephemeral", "ttl": [1]}, {"type": "x"}, 3]
)
KINDS = ["text", "tool_use", "tool_result", "thinking", "redacted_thinking", "image", "document", 3]


@st.composite
def blocks(draw: st.DrawFn) -> Any:
    """A block with most of the fields that its type wants, and some of wrong types."""
    good = {
        "text": st.text("ab \n", max_size=5), "id": st.just("t1"), "name": st.just("look"), "thinking": st.just("hm"),
        "input": st.dictionaries(st.just("city"), JSON, max_size=1), "tool_use_id": st.just("t1"),
        "content": st.text("ab", max_size=3) | st.lists(st.just({"type": "text", "text": "a"}), max_size=2),
        "is_error": st.booleans(), "cache_control": CONTROL,
    }  # fmt: skip
    names = draw(st.sets(st.sampled_from(sorted(good))))
    block = {name: draw(good[name] | JSON) for name in sorted(names)}
    return draw(st.just({**block, "type": draw(st.sampled_from(KINDS))}) | JSON)


CONTENT = st.text("ab", max_size=4) | st.lists(blocks(), max_size=4) | JSON
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system", "x"]), "content": CONTENT})
BODY = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE | JSON, max_size=4)},
    optional={
        "system": CONTENT, "tools": st.lists(blocks() | JSON, max_size=2), "cache_control": CONTROL | JSON,
        "tool_choice": st.dictionaries(st.sampled_from(["type", "name", "disable_parallel_tool_use"]), JSON),
        "thinking": st.dictionaries(st.sampled_from(["type", "budget_tokens"]), JSON),
        "output_config": st.dictionaries(st.sampled_from(["format", "effort"]), JSON),
        "stop_sequences": st.lists(st.text("ab", min_size=1, max_size=3), max_size=3),
    },
)  # fmt: skip


@given(BODY)
@example({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking"}]}]})
def test_any_body_is_a_chat_or_an_error_that_names_it(fields: dict[str, Any]) -> None:
    try:
        body = body_of({"max_tokens": 5, **fields}, MessagesBody)
        chat = chat_of(body, "m", Breakpoints())
        plain = check_messages(chat.messages)
    except ApiError as error:
        assert error.status == 400 and error.message
        return
    marked = chat_of(body, "m", Breakpoints(is_marking=True))
    assert msgspec.json.decode(MARKS.sub("", msgspec.json.encode(check_messages(marked.messages)).decode())) == plain
    assert all(one["role"] != other["role"] or one["role"] == "tool" for one, other in itertools.pairwise(plain))


def test_each_block_that_asks_for_it_has_its_mark() -> None:
    control = {"cache_control": {"type": "ephemeral"}}
    said = [{"type": "text", "text": f"part {number} ", **control} for number in range(BREAKPOINTS_MAX)]
    body = body_of({"max_tokens": 5, "messages": [{"role": "user", "content": said}]}, MessagesBody)
    breakpoints = Breakpoints(is_marking=True)
    (message,) = check_messages(chat_of(body, "m", breakpoints).messages)
    assert MARKS.findall(message["content"]) == ["0", "1", "2", "3"] and breakpoints.ttls_s == [300.0] * 4
    assert message["content"].endswith(" "), "a mark stands before the spaces that a template may strip"


@pytest.mark.parametrize(
    ("thinking", "told"), [(None, False), ({"type": "enabled"}, True), ({"type": "between_tools"}, False)]
)
def test_templates_variables_say_whether_to_think(thinking: Any, told: bool) -> None:
    fields = {"max_tokens": 5, "messages": [{"role": "user", "content": "x"}], "thinking": thinking}
    chat = chat_of(body_of(fields, MessagesBody), "m", Breakpoints())
    assert chat.chat_template_kwargs == {"enable_thinking": told, "thinking": told}
