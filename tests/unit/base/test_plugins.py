"""Plug-ins of other distributions: found by name, listed, and refused with one clear error each."""

from __future__ import annotations

from pathlib import Path

import pytest

from memserve.base.errors import UserError
from memserve.base.plugins import (
    ADMISSION_CONTROLLERS,
    GROUPS,
    KV_EVENT_FORMATS,
    ROUTING_POLICIES,
    PluginGroup,
    check_methods,
    split_settings,
)
from written_plugins import plugin_folder, write_plugins

__all__ = ["plugin_folder"]


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.group)
def test_own_parts_are_loaded_as_plugins_are(group: PluginGroup) -> None:
    for name in group.built_in:
        assert callable(group.load(name))


def test_a_plugin_is_found_by_its_name(plugin_folder: Path) -> None:
    write_plugins(
        plugin_folder, "found_one", "def warmest(a, b, c): return 'warm'", {ROUTING_POLICIES.group: ["warmest"]}
    )
    assert ROUTING_POLICIES.names() == [*ROUTING_POLICIES.built_in, "warmest"]
    assert ROUTING_POLICIES.load("warmest")(1, 2, 3) == "warm"
    (plugin,) = ROUTING_POLICIES.installed_plugins()
    assert (plugin.name, plugin.distribution, plugin.version, plugin.problem) == ("warmest", "found_one", "1.5", "")


BAD = """
def too_few(ask): ...
not_callable = 3
class Raises:
    def __init__(self): raise KeyError("never made")
"""


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("too-few", r"it cannot be called with \(ask, first, decoders\): too many positional arguments"),
        ("not-callable", r"it cannot be called with \(ask, first, decoders\)"),
        ("absent", "has no attribute 'absent'"),
    ],
)
def test_an_unusable_plugin_is_one_clear_error(name: str, why: str, plugin_folder: Path) -> None:
    functions = ["too_few", "not_callable", "absent"]
    write_plugins(plugin_folder, f"bad_{name.replace('-', '_')}", BAD, {ROUTING_POLICIES.group: functions})
    with pytest.raises(
        UserError, match=rf"policy '{name}' \(bad_\w+:\w+ of bad_\w+ 1\.5\) cannot be loaded: .*{why}"
    ) as caught:
        ROUTING_POLICIES.load(name)
    assert "candidates.Policy" in str(caught.value.hint)


@pytest.mark.parametrize("line", ["import no_such_module", "raise SystemExit(3)", "1 / 0"])
def test_a_module_that_fails_is_one_clear_error(line: str, plugin_folder: Path) -> None:
    name = f"failing_{abs(hash(line))}"
    write_plugins(plugin_folder, name, f"{line}\ndef some(payload): ...", {KV_EVENT_FORMATS.group: ["some"]})
    with pytest.raises(UserError, match=rf"format of KV events 'some' \({name}:some of {name} 1\.5\) cannot be loaded"):
        KV_EVENT_FORMATS.load("some")
    (plugin,) = KV_EVENT_FORMATS.installed_plugins()
    assert "cannot be loaded" in plugin.problem


def test_own_names_are_never_taken(plugin_folder: Path) -> None:
    module = "def none(settings): raise AssertionError('not this one')"
    write_plugins(plugin_folder, "takes_names", module, {ADMISSION_CONTROLLERS.group: ["none"]})
    assert ADMISSION_CONTROLLERS.load("none")({})(None, None, 0).kind == "admit"
    (plugin,) = ADMISSION_CONTROLLERS.installed_plugins()
    assert plugin.problem == "memserve's own admission controller 'none' is used"
    assert ADMISSION_CONTROLLERS.names() == list(ADMISSION_CONTROLLERS.built_in)


def test_a_name_that_two_distributions_bring_is_refused(plugin_folder: Path) -> None:
    for number in (1, 2):
        module = "def same(settings): ..."
        write_plugins(plugin_folder, f"same_{number}", module, {ADMISSION_CONTROLLERS.group: ["same"]}, f"{number}.0")
    with pytest.raises(UserError, match=r"'same' is brought by same_\d \d.0, same_\d \d.0") as caught:
        ADMISSION_CONTROLLERS.load("same")
    assert caught.value.hint == "uninstall all but one"
    assert [bool(plugin.problem) for plugin in ADMISSION_CONTROLLERS.installed_plugins()] == [True, True]
    assert ADMISSION_CONTROLLERS.load("bounded"), "others are not concerned"


def test_methods_are_looked_at_by_name_and_arguments() -> None:
    class Part:
        def read(self, offset: int) -> None: ...

    with pytest.raises(TypeError, match=r"read: it cannot be called with \(offset, into\)"):
        check_methods(Part(), {"read": ("offset", "into")})
    with pytest.raises(TypeError, match="write: it cannot be called"):
        check_methods(Part(), {"read": ("offset",), "write": ()})


def test_settings_follow_the_name() -> None:
    assert split_settings("share:requests=4,path=/a=b", "--admission") == ("share", {"requests": "4", "path": "/a=b"})
    assert split_settings("share", "--admission") == ("share", {})
    for text in ("share:requests", "share:=4", "share:a=1,a=2", "share:a=1,"):
        with pytest.raises(UserError, match="in --admission share"):
            split_settings(text, "--admission")
