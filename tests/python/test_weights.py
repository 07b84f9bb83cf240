"""examples/weights: what trainers publish is in use at those who infer, bit for bit, in every way."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from harness import BACKEND, World, fresh_store

FOLDER = Path(__file__).parents[2] / "examples" / "weights"
sys.path.insert(0, str(FOLDER))

import delivery  # noqa: E402
import network  # noqa: E402
import weights  # noqa: E402

pytestmark = pytest.mark.skipif(BACKEND != "ncclx_rs", reason="the program names its backend")

SHAPE, STEPS = network.Shape(layers=1, width=36), 12


def performs(rank: int, size: int, folder: Path) -> dict[str, weights.Report]:
    reports = {}
    for index, way in enumerate(weights.WAYS):
        place = folder / str(index)
        place.mkdir(exist_ok=True)
        reports[way] = weights.perform(way, rank, fresh_store(), place, SHAPE, STEPS)
    return reports


@pytest.mark.worlds(sizes=(4,), modes=("shm",))
def test_weights_arrive_in_all_ways(world: World, tmp_path: Path) -> None:
    parts = world.run(performs, tmp_path, join=False)
    reports = {way: [part[way] for part in parts] for way in weights.WAYS}
    weights.compare(reports)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        weights.show(reports, network.Layout(SHAPE, weights.TRAINERS))
    assert len(re.findall(r"^\| .* \| \d+ \| [\d.]+ \| [\d.]+ \| \d+ \|$", printed.getvalue(), re.MULTILINE)) == 4
    way = weights.WAYS[1]
    for wrong in ({"digest": "0"}, {"versions": 99}, {"losses": [0.0]}, {"units": 0}):
        spoilt = reports | {way: [replace(reports[way][0], **wrong), *reports[way][1:]]}
        with pytest.raises(RuntimeError, match=f"{way}: "):
            weights.compare(spoilt)


def test_the_command_launches_every_process(tmp_path: Path) -> None:
    """The command's own part, without the seconds in which four processes load PyTorch."""
    layout = network.Layout(network.Shape(), weights.TRAINERS)
    report = vars(weights.Report("d", 2, 60, 1.0, [], [0.1, 0.2]))

    def launched(command: list[str], **_: object) -> mock.Mock:
        folder = Path(command[-1])
        assert command[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
        for rank in range(4):
            told = report | {"losses": [2.0, 1.0] if rank < 2 else []}
            torch.save({weights.WAYS[0]: told}, folder / f"reports{rank}.pt")
        return mock.Mock(returncode=0)

    command = [str(FOLDER / "weights.py"), "--ways", weights.WAYS[0]]
    with (
        mock.patch.object(sys, "argv", command),
        mock.patch("subprocess.run", launched),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        runpy.run_path(command[0], run_name="__main__")
    assert f"{4 * layout.elements / 1e6:.1f} MB of weights, loss 2.0000 -> 1.0000" in printed.getvalue()
    assert "bit for bit" in printed.getvalue()


def test_shards_lie_where_torch_chunk_cuts() -> None:
    whole = network.Network(SHAPE)
    for trainers in (1, 2, 3):
        layout = network.Layout(SHAPE, trainers)
        slot = torch.full((layout.elements,), torch.nan)
        for trainer in range(trainers):
            shards = []
            for weight in whole.parameters():
                parts = weight.detach().chunk(trainers)
                shards.append(parts[trainer] if trainer < len(parts) else weight.detach()[:0])
            staged = torch.zeros(layout.count(trainer))
            layout.stage(iter(shards), trainer, staged)
            for span in layout.spans(trainer):
                slot[span.in_model : span.in_model + span.count] = staged[span.at_trainer :][: span.count]
            assert layout.checksum_of_staged(staged) == layout.checksum_in_model(slot, trainer)
        tokens = network.batch(0, 0)[0]
        assert torch.equal(layout.network(slot)(tokens), whole(tokens))
        with pytest.raises(ValueError, match="expected a shard of"):
            layout.stage((weight[1:] for weight in whole.parameters()), 0, torch.zeros(layout.count(0)))


class Filled(delivery.Subscriber):
    """Slots without a trainer."""

    def arrived(self, version: int) -> None: ...

    def take(self, version: int) -> None: ...

    def close(self) -> None: ...


def test_a_wrong_checksum_is_named(tmp_path: Path) -> None:
    layout = network.Layout(SHAPE, 2)
    subscriber = Filled(delivery.Job(layout, 1, mock.Mock(), tmp_path), 0)
    subscriber.slots[1].copy_(torch.arange(layout.elements))
    sums = [layout.checksum_in_model(subscriber.slots[1], trainer) for trainer in range(2)]
    headers = [delivery.Header(3, 7, 0, 0, checksum) for checksum in sums]
    subscriber.check(3, headers)
    subscriber.slots[1].view(torch.uint8)[4 * layout.spans(1)[0].in_model] ^= 1
    with pytest.raises(RuntimeError, match=r"version 3 of trainer 1: checksum \w{8}, not \w{8}"):
        subscriber.check(3, headers)
    subscriber.slots[1].view(torch.uint8)[4 * layout.spans(1)[0].in_model] ^= 1
    with pytest.raises(RuntimeError, match="expected version 3 from all trainers, got"):
        subscriber.check(3, [headers[0], replace(headers[1], step=8)])
