"""`make mutations-cuda`: its mutations apply to the sources as they are; what it makes of tests that fail or hang."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "mutations"))
from mutations import MUTATIONS, ROOT, Edit, Mutation  # noqa: E402  # tests/mutations is no package
from run_mutations import mutated, outcomes, survivors  # noqa: E402


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_applies_to_the_sources(mutation: Mutation) -> None:
    assert mutation.edits and mutation.tests
    for edit in mutation.edits:
        assert edit.apply(ROOT) != (ROOT / edit.file).read_text(), edit
    for test in mutation.tests:
        module, _, name = test.partition("::")
        assert f"#[test]\nfn {name}(" in (ROOT / f"tests/cuda/{module}.rs").read_text(), test


def test_mutations_have_names_of_their_own() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)


def test_a_text_must_stand_there_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("one two two")
    assert Edit("file", "one", "1").apply(tmp_path) == "1 two two"
    for text, count in (("two", 2), ("three", 0)):
        with pytest.raises(ValueError, match=f"file has this {count} times"):
            Edit("file", text, "2").apply(tmp_path)


def test_a_tree_is_mutated_for_a_while(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("one two")
    mutation = Mutation("name", "why", (Edit("file", "one", "1"), Edit("file", "two", "2")), ("test",))
    with mutated(mutation, tmp_path):
        assert file.read_text() == "1 2"
    assert file.read_text() == "one two"
    wrong = Mutation("name", "why", (Edit("file", "one", "1"), Edit("file", "three", "3")), ("test",))
    with pytest.raises(ValueError), mutated(wrong, tmp_path):
        pytest.fail("it does not apply")
    assert file.read_text() == "one two"


def test_only_a_test_that_passes_has_not_noticed(tmp_path: Path) -> None:
    printed = "test a::good ... ok\ntest a::bad ... FAILED\ntest a::late ... "
    found = outcomes(("sh", "-c", f"printf '{printed}'; sleep 99"), ("a::good", "a::bad", "a::late"), tmp_path, 5)
    assert found == {"a::good": "ok", "a::bad": "FAILED", "a::late": "no end"}
    assert survivors(found) == ["a::good"]
