"""The 3-D algorithm is a rule file: what it says, and that another file says something else."""

from __future__ import annotations

from importlib import resources

import pytest

from partir import rules
from partir.errors import RuleError

TEXT = resources.files("partir.rules").joinpath("placement_3d.rules").read_text()


def test_states_and_directions_are_those_of_the_law() -> None:
    placement = rules.placement()
    assert placement.states["y"] == {"m": ("data", "x"), "k": ("z",), "n": ("y",)}
    assert placement.states["z"] == {"m": ("data", "x"), "k": ("y",), "n": ("z",)}
    assert placement.directions == {"y": {"a": "y", "b": "x", "c": "z"}, "z": {"a": "z", "b": "x", "c": "y"}}
    assert placement.swap == {"y": "z", "z": "y"}
    assert (placement.start, placement.lookup_start) == ("y", "z")


def test_matrices_at_rest() -> None:
    placement = rules.placement()
    assert placement.at_rest("y", "a") == {"m": ("data", "x", "y"), "k": ("z",)}
    assert placement.at_rest("y", "b", first="n") == {"n": ("y", "x"), "k": ("z",)}
    assert placement.at_rest("y", "b", first="k") == {"n": ("y",), "k": ("z", "x")}
    assert placement.at_rest("y", "c") == {"m": ("data", "x", "z"), "n": ("y",)}
    assert placement.at_rest("z", "b", first="k") == {"k": ("y", "x"), "n": ("z",)}
    assert placement.compute("y", "b") == (("z",), ("y",))


def test_the_result_at_rest_is_the_input_of_the_other_state() -> None:
    placement = rules.placement()
    for state in placement.states:
        result = placement.at_rest(state, "c")
        given = placement.at_rest(placement.swap[state], "a")
        assert (result["m"], result["n"]) == (given["m"], given["k"])


def test_vectors() -> None:
    vectors = rules.placement().vectors
    assert vectors["balanced"]["y"].axes == ("y", "z", "x") and vectors["balanced"]["z"].axes == ("z", "x")
    assert vectors["diagonal"]["y"] == vectors["diagonal"]["z"]
    assert vectors["diagonal"]["y"].axes == ("y", "x") and vectors["diagonal"]["y"].owner == ("y", "z")


def test_another_placement_is_another_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "mine.rules"
    path.write_text(TEXT.replace("start y, lookup z", "start z"))
    other = rules.placement(path)
    assert (other.start, other.lookup_start, other.name) == ("z", "z", "mine")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("k -> z, n -> y", "q -> z, n -> y", "unknown index `q`; the product has k, m, n"),
        ("k -> z, n -> y", "k -> y, n -> y", "index `n`: an index or an axis stands twice in one state"),
        ("m -> data.x, k -> z, n -> y", "m -> data.x, k -> z", "this state gives no axis to n"),
        ("start y", "start w", "unknown state `w`; known: y, z"),
        ("    swap y <-> z", "", "the placement does not say `swap`"),
        ("a.m", "a.n", "`a` has no index `n`; it has m, k"),
        ("swap y", "sweep y", "unknown clause `sweep`; known: state, start, rest, swap, hidden"),
        ("swap y <-> z", "swap y -> z", "unexpected `->`; expected `<->`"),
    ],
)
def test_mistakes(old: str, new: str, message: str) -> None:
    rules.parse_placement(TEXT)
    assert old in TEXT
    with pytest.raises(RuleError) as error:
        rules.parse_placement(TEXT.replace(old, new, 1), "p.rules")
    assert message in str(error.value)


def test_unknown_placement_and_misplaced_entries() -> None:
    with pytest.raises(RuleError, match="no placement placement_4d"):
        rules.placement("placement_4d")
    with pytest.raises(RuleError, match="belongs in a placement file"):
        rules.parse_rules(TEXT)
    with pytest.raises(RuleError, match="a placement file holds no `op`"):
        rules.parse_placement(TEXT + "\nop aten.relu(x[*]) -> y[*]\n")
