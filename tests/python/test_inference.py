"""examples/inference: every way of adding up a cut model's parts makes the tokens of the whole model."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
import types
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, World, fresh_store

FOLDER = Path(__file__).parents[2] / "examples" / "inference"
sys.path.insert(0, str(FOLDER))

import decode  # noqa: E402
import llama  # noqa: E402

pytestmark = pytest.mark.skipif(BACKEND != "ncclx_rs", reason="the program names its backends")

SHAPE = llama.Shape(layers=2, width=64, heads=4, kv_heads=2, hidden=96, vocabulary=128)
TASK = decode.Task(SHAPE, batches=(1, 3), prompt=5, count=8)


def decodes(rank: int, size: int) -> dict[str, decode.Result]:
    return {way: decode.run(way, TASK, rank, size, fresh_store()) for way in decode.WAYS if way != decode.DEEPSPEED}


@pytest.mark.worlds(sizes=(2,), modes=("shm",))
def test_all_ways_make_the_same_tokens(world: World) -> None:
    parts = world.run(decodes, join=False)
    results = {way: [part[way] for part in parts] for way in parts[0]}
    decode.compare(results)
    tokens = results[decode.OURS][0].tokens
    assert [[len(made) for made in batch] for batch in tokens] == [[8], [8] * 3]
    assert len({token for batch in tokens for made in batch for token in made}) > 2, "tokens that tell nothing"
    missing = decode.Result([], [], "it is not here")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        decode.show(results | {decode.DEEPSPEED: [missing] * 2}, TASK.batches)
    lines = printed.getvalue().splitlines()
    assert lines[0].endswith("| tokens/s, batch 1 | tokens/s, batch 3 |")
    assert [bool(re.search(r"\| [\d.]+ \| [\d.]+ \|$", line)) for line in lines[2:]] == [True] * 4 + [False]
    assert lines[-1].endswith("DeepSpeed | it is not here |")
    other = [[[token ^ 1 for token in made] for made in batch] for batch in tokens]
    spoilt = [replace(result, tokens=other) for result in results[decode.OURS]]
    with pytest.raises(RuntimeError, match="operator, ncclx_rs: made other tokens than plans, gloo"):
        decode.compare(results | {decode.OURS: spoilt})
    with pytest.raises(RuntimeError, match="operator, ncclx_rs: the ranks made different tokens"):
        decode.compare(results | {decode.OURS: [results[decode.OURS][0], spoilt[1]]})


def a_cut_model_is_the_whole(rank: int, size: int) -> None:
    """In float32, where a sum over parts differs from the whole in the last bits alone."""
    prompt = torch.randint(SHAPE.vocabulary, (3, 5), generator=torch.Generator().manual_seed(1))

    def hidden(model: llama.Llama, ranks: int) -> torch.Tensor:
        model.float().begin(3, 6, ranks)
        model.rotation = model.rotation.float()
        for layer in model.layers:
            layer.attention.keys, layer.attention.values = layer.attention.keys.float(), layer.attention.values.float()
        seen = []
        model.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        model(model(prompt, 0), 5)
        return torch.cat(seen, 1)

    cut = llama.Llama(SHAPE)
    llama.cut_by_hand(cut, rank, size, dist.all_reduce)
    torch.testing.assert_close(hidden(cut, size), hidden(llama.Llama(SHAPE), 1))


@pytest.mark.worlds(sizes=(2,), modes=("shm",))
def test_a_cut_model_is_the_whole(world: World) -> None:
    world.run(a_cut_model_is_the_whole)


def deepspeed_is_called(rank: int, size: int) -> None:
    """With a module in DeepSpeed's place, whose call is gloo's."""
    calls = []

    def inference_all_reduce(tensor: torch.Tensor) -> None:
        calls.append(tensor.shape)
        dist.all_reduce(tensor)

    comm = types.ModuleType("deepspeed.comm")
    comm.init_distributed = lambda dist_backend, verbose: None  # type: ignore[attr-defined]
    comm.inference_all_reduce = inference_all_reduce  # type: ignore[attr-defined]
    package = types.ModuleType("deepspeed")
    package.comm = comm  # type: ignore[attr-defined]
    modules = mock.patch.dict(sys.modules, {"deepspeed": package, "deepspeed.comm": comm})
    found = mock.patch("importlib.util.find_spec", lambda name: object() if name == "deepspeed" else None)
    environment = mock.patch.dict("os.environ")
    with modules, found, environment:
        lacking = decode.run(decode.DEEPSPEED, TASK, rank, size, fresh_store())
        assert lacking.lacking == "deepspeed has not built its shared memory here" and not dist.is_initialized()
        with mock.patch.object(torch.ops, "deepspeed", mock.Mock(), create=True):
            result = decode.run(decode.DEEPSPEED, TASK, rank, size, fresh_store())
    assert not result.lacking and len(calls) == 2 * 2 * TASK.count * SHAPE.layers * 2
    result_of_gloo = decode.run(decode.GLOO, TASK, rank, size, fresh_store())
    assert result.tokens == result_of_gloo.tokens


@pytest.mark.worlds(sizes=(2,), modes=("shm",))
def test_deepspeed_is_called_where_it_is(world: World) -> None:
    world.run(deepspeed_is_called, join=False)


def test_the_command_launches_every_rank(capsys: pytest.CaptureFixture[str]) -> None:
    """The command's own part, without the seconds in which the ranks load PyTorch."""

    def launched(command: list[str], **_: object) -> mock.Mock:
        assert command[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        assert command[6:-2] == [*arguments]
        for rank in range(2):
            made = vars(decode.Result([[[1, 2]], [[3, 4 + different * rank]]], [10.0, 80.0 + rank]))
            torch.save({decode.OURS: made}, Path(command[-1]) / f"results{rank}.pt")
        return mock.Mock(returncode=0)

    arguments = [str(FOLDER / "decode.py"), "--ways", decode.OURS]
    with mock.patch.object(sys, "argv", arguments), mock.patch("subprocess.run", launched):
        different = 0
        runpy.run_path(arguments[0], run_name="__main__")
        assert f"| {decode.OURS} | 10.0 | 80.0 |" in capsys.readouterr().out
        different = 1
        with pytest.raises(SystemExit, match="the ranks made different tokens"):
            runpy.run_path(arguments[0], run_name="__main__")
        arguments += ["--ranks", "3"]
        with pytest.raises(SystemExit):
            runpy.run_path(arguments[0], run_name="__main__")
    assert "argument --ranks: expected a divisor of 8, got 3" in capsys.readouterr().err


def test_deepspeed_is_said_to_be_missing() -> None:
    with mock.patch("importlib.util.find_spec", lambda name: None):
        result = decode.run(decode.DEEPSPEED, TASK, 0, 1, mock.Mock())
    assert result == decode.Result([], [], "deepspeed is not installed")
    with pytest.raises(RuntimeError, match="no way could run"):
        decode.compare({decode.DEEPSPEED: [result]})
