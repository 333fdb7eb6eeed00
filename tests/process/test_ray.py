"""Several raylets of Ray's own test cluster: scaled and struck under load, no request fails, every answer is right."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from asking_clients import QUESTIONS, Load, truth_of
from lora_files import merged, save_adapter
from memserve.cli.cluster.ray import _DROPPED, without_flags
from on_ray import CLIENTS, COUNT, PAUSE_S, WAIT_S, OnRay
from served_cluster import Server, eventually
from served_store import ServedStore
from tiny_models import greedy_tokens, prompt, save_folder, tiny_module

pytest.importorskip("ray", reason="Ray (extra: ray) is not installed")
pytestmark = pytest.mark.timeout(900)  # three raylets and four instances share the machine with other tests


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tiny_module("llama"), tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def truth(model: Path) -> list[str]:
    return truth_of(model, COUNT)


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[OnRay]:
    served = OnRay(model)
    yield served
    served.close()


def test_scaling_up_and_down_loses_no_request(served: OnRay, truth: list[str]) -> None:
    """1P1D to 2P2D and back, under load."""
    assert served.lines[0].startswith("ready in "), served.lines
    assert served.up() == {"p1", "d1"}
    with Load(served.ask, truth, CLIENTS, PAUSE_S) as load:
        told = served.scale("prefill=2", "decode=2")
        assert told.split("\n")[:2] == ["prefill: p1, p2", "decode: d1, d2"]
        assert served.up() == {"p1", "p2", "d1", "d2"}
        before = load.answers
        eventually(lambda: load.answers > before + 2 * QUESTIONS)
        assert served.scale("prefill=1", "decode=1").split("\n")[:2] == ["prefill: p1", "decode: d1"]
        eventually(lambda: served.up() == {"p1", "d1"})
        before = load.answers
        eventually(lambda: load.answers > before + QUESTIONS)
    assert load.wrong == []
    assert served.counter("router_members_left_total") == 2, "those that were too many said goodbye"
    assert served.counter("router_members_died_total") == 0


def test_a_lost_node_costs_no_request(served: OnRay, truth: list[str]) -> None:
    """Two of each role, a raylet killed with -9 under load: its instances come back on the other node."""
    served.scale("prefill=2", "decode=2")
    everyone = {"p1", "p2", "d1", "d2"}
    with Load(served.ask, truth, CLIENTS, PAUSE_S) as load:
        eventually(lambda: load.answers > QUESTIONS)
        died = served.counter("router_members_died_total")
        served.ray.kill_raylet(0)
        eventually(lambda: served.counter("router_members_died_total") > died)
        before = load.answers
        eventually(lambda: load.answers > before + QUESTIONS)
        eventually(lambda: served.up() == everyone)
        before = load.answers
        eventually(lambda: load.answers > before + QUESTIONS)
    assert load.wrong == []


def test_the_end(served: OnRay) -> None:
    """SIGTERM drains everything and ends with 0."""
    assert served.end() == 0
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{served.url}/health", timeout=5)


def test_counts_follow_the_load(served: OnRay, model: Path, truth: list[str]) -> None:
    """On the node that is left: the router's policy decides, and Ray starts and ends the actors."""
    flags = ("--scale", "colocated=1..2", "--scale-up-after", "1", "--scale-down-after", "10", "--max-running", "1")
    scaled = OnRay(model, *flags, prefill=0, decode=0, ray=served.ray)
    try:
        assert scaled.up() == {"c1"}
        with Load(scaled.ask, truth, 6) as load:
            eventually(lambda: scaled.up() == {"c1", "c2"})
        eventually(lambda: scaled.up() == {"c1"})
        assert load.wrong == [] and load.answers
        assert scaled.counter("router_members_left_total") == 1, "it drained and said goodbye"
        assert scaled.end() == 0
    finally:
        scaled.process.kill()


def test_an_instance_of_several_workers_gets_as_many_gpus(served: OnRay, model: Path, truth: list[str]) -> None:
    """Ray only says that there are GPUs: the instance is placed by them, is shown them, and computes on the CPU."""
    reserved = "colocated=CPU:1,GPU:2"
    flags = ("--colocated", "1", "--pipeline-parallel", "2", "--device", "cpu", "--ray-resources", reserved)
    placed = OnRay(model, *flags, prefill=0, decode=0, ray=served.ray)
    try:
        assert placed.up() == {"c1"}
        assert sorted(placed.gpus_shown_to("c1")) == ["0", "1"]
        assert placed.ask(0) == truth[0]
        assert placed.end() == 0
    finally:
        placed.process.kill()


def test_clusters_of_other_names_share_a_ray(
    served: OnRay, model: Path, truth: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    shape = ("--colocated", "1", "--ray-resources", "colocated=CPU:0.5")
    first, second = (
        OnRay(model, *shape, "--ray-cluster", name, prefill=0, decode=0, ray=served.ray) for name in ("one", "two")
    )
    try:
        twin = OnRay(model, *shape, "--ray-cluster", "two", prefill=0, decode=0, ray=served.ray)
        assert twin.process.wait(WAIT_S) == 1
        assert "a cluster of memserve called two runs on this Ray" in capfd.readouterr().err
        assert [cluster.ask(0) for cluster in (first, second)] == [truth[0]] * 2
        status, text = first.try_to_scale("colocated=2")
        assert status == 1 and "several clusters of memserve run" in text and "one of one, two" in text
        status, text = first.try_to_scale("colocated=2", "--ray-cluster", "three")
        assert status == 1 and "no cluster of memserve called three runs" in text
        assert second.scale("colocated=2", "--ray-cluster", "two").startswith("colocated: c1, c2\n")
        assert (first.up(), second.up()) == ({"c1"}, {"c1", "c2"})
        assert first.end() == 0
        assert second.scale("colocated=1").startswith("colocated: c1\n")  # it is the only one
        third = OnRay(model, *shape, prefill=0, decode=0, ray=served.ray)
        again = OnRay(model, *shape, prefill=0, decode=0, ray=served.ray)
        assert again.process.wait(WAIT_S) == 1
        assert "another cluster of memserve runs on this Ray" in capfd.readouterr().err
        assert third.scale("colocated=1").startswith("colocated: c1\n")  # without a name it is the one without
        assert [cluster.ask(1) for cluster in (second, third)] == [truth[1]] * 2
        assert [cluster.end() for cluster in (second, third)] == [0, 0]
    finally:
        for cluster in (first, second):
            cluster.process.kill()


def test_a_store_that_runs_already_outlives_clusters(
    served: OnRay, model: Path, truth: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store = ServedStore(tmp_path, dram="16MiB")
    flags = ("--colocated", "1", "--store", store.address, "--cluster-secret-file")
    try:
        for is_second in (False, True):
            placed = OnRay(model, *flags, str(store.secret_file), prefill=0, decode=0, ray=served.ray)
            try:
                if is_second:  # it has what the first one computed
                    eventually(lambda placed=placed: placed.counter("store_tree_blocks"))
                assert [placed.ask(seed) for seed in range(8)] == truth
                eventually(lambda placed=placed: placed.counter("store_tree_blocks"))
                assert placed.end() == 0
            finally:
                placed.process.kill()
        other = tmp_path / "other"
        other.write_text("another secret, long enough as well")
        other.chmod(0o600)
        wrong = OnRay(model, *flags, str(other), prefill=0, decode=0, ray=served.ray)
        assert wrong.process.wait(WAIT_S) == 1
        assert f"the store at {store.address} has another secret" in capfd.readouterr().err
    finally:
        assert store.close() == 0


def test_routers_adapters_and_engines_go_with_ray(served: OnRay, model: Path, truth: list[str], tmp_path: Path) -> None:
    """Two routers at one port, beside a server of another model; an adapter that one loads is served by both."""
    module, place = tiny_module("llama"), tmp_path / "adapters"
    adapted = merged(module, save_adapter(place / "one", module, ["q_proj", "v_proj"], 1))
    tokens = prompt(20, seed=3)
    expected = [f"w{token}" for token in greedy_tokens(adapted, tokens, 6) if token not in (0, 2)]
    other = Server(save_folder(tiny_module("qwen3"), tmp_path / "other"))
    flags = ["--ray-cluster", "routers", "--colocated", "2", "--routers", "2", "--lora-folder", str(place)]
    flags += ["--engine", f"openai={other.url.removesuffix('/v1')}"]
    placed = OnRay(model, *flags, prefill=0, decode=0, ray=served.ray)
    try:
        assert placed.routers() == 2

        def post(path: str, **body: object) -> httpx.Response:
            """Over a connection of its own: any router may get it."""
            return httpx.post(f"{placed.url}/v1/{path}", json=body, timeout=WAIT_S)

        assert post("load_lora_adapter", lora_name="a", lora_path="one").status_code == 200
        for seed in range(12):
            answer = post(
                "completions", model="a", prompt=tokens.tolist(), max_tokens=6, temperature=0, ignore_eos=True
            )
            assert answer.json()["choices"][0]["text"].split() == expected
            assert placed.ask(seed % QUESTIONS) == truth[seed % QUESTIONS]
            assert post("completions", model="other", prompt="w3 w4", max_tokens=2).json()["model"] == "other"
        assert post("unload_lora_adapter", lora_name="a").status_code == 200
        assert {post("completions", model="a", prompt="w3", max_tokens=1).status_code for _ in range(12)} == {404}
        assert placed.end() == 0
    finally:
        placed.process.kill()
        other.process.kill()
        other.process.wait(WAIT_S)


def test_crash_looping_ray_instance_is_not_restarted_forever(
    served: OnRay, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Only its node knows that it has less memory than is asked for."""
    refused = OnRay(model, "--colocated", "1", "--kv-memory", "4000GiB", prefill=0, decode=0, ray=served.ray)
    try:
        assert refused.process.wait(WAIT_S) == 1
        assert "c1 has ended 3 times before it was a member" in capfd.readouterr().err
    finally:
        refused.process.kill()


def test_instances_that_cannot_be_added_are_not_kept(served: OnRay, model: Path, tmp_path: Path) -> None:
    """The model is gone when another one is asked for; the one that has loaded it goes on."""
    own = shutil.copytree(model, tmp_path / "tiny")
    placed = OnRay(own, "--colocated", "1", prefill=0, decode=0, ray=served.ray)
    try:
        own.rename(tmp_path / "elsewhere")
        status, told = placed.try_to_scale("colocated=2")
        assert status == 1 and "c2 has ended 3 times before it was a member" in told
        assert placed.scale("colocated=1").startswith("colocated: c1\n") and placed.up() == {"c1"}
        (tmp_path / "elsewhere").rename(own)
        assert placed.scale("colocated=2").startswith("colocated: c1, c2\n")
        assert placed.end() == 0
    finally:
        placed.process.kill()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tensor-parallel", "2", "--ray-resources", "colocated=GPU:1"], "needs 2 GPUs, and not 1"),
        (["--ray-resources", "colocated=GPU:2"], "of 1 worker needs one GPU or a part of it, and not 2"),
        (["--device", "cuda:1"], "Ray chooses the GPUs"),
        (["--device", "gpu"], "unknown device 'gpu'"),
        (["--gpu-memory-share", "0.5"], "needs a GPU"),
    ],
)
def test_unsuitable_gpus_are_refused_before_placement(
    served: OnRay, capfd: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    from memserve.cli.main import run

    assert run(["serve", "--on", "ray", "--address", served.ray.address, "--colocated", "1", *words]) == 1
    assert message in capfd.readouterr().err


def test_words_of_the_driver_are_not_those_of_the_router() -> None:
    words = ["serve", "--on", "ray", "--port=1", "--dtype", "float32", "--api-key", "k", "--lenient", "--prefill", "2"]
    assert without_flags(words, _DROPPED) == ["serve", "--dtype", "float32", "--lenient"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "--address", "192.0.2.1:6379"], "--address, --ray-resources and --ray-cluster are"),
        (["serve", "--ray-cluster", "x"], "--address, --ray-resources and --ray-cluster are"),
        (["serve", "--on", "ray", "--ray-cluster", "x/y"], "is no name of a cluster"),
        (["serve", "--on", "ray", "--address", "127.0.0.1:1"], "no Ray at 127.0.0.1:1"),
        (["serve", "--on", "ray", "--ray-resources", "decode=GPU"], "cannot read --ray-resources"),
        (["serve", "--on", "ray", "--scale", "decode=1..2", "--scale-file", "x"], "Ray carries out the decisions"),
        (["serve", "--on", "ray", "--in-process"], "--in-process runs one engine without a cluster"),
        (["scale", "prefill"], "ROLE=COUNT is needed"),
        (["scale", "prefill=1", "--address", "127.0.0.1:1"], "no Ray at 127.0.0.1:1"),
    ],
)
def test_wrong_words(capfd: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    from memserve.cli.main import run

    assert run(words) == 1
    assert message in capfd.readouterr().err
