"""Mutations of the engine of streams: what breaks one of its rules, and the tests that must see it.

The first eight are those of the design, which each break what one race relies on (`tests/cuda/races.rs`). A mutation
may pause where another thread would have to come at the right moment: that makes the race likely, and changes nothing
else. In the engine's own collectives each rank hears of every other in every segment, so what frees memory shows only
in a schedule without that (`tests/cuda/lanes.rs`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Edit:
    """Text that stands once in a file, and what replaces it."""

    file: str
    old: str
    new: str

    def apply(self, root: Path) -> str:
        """The file's text once it is edited.

        Raises:
            ValueError: The text does not stand there once.
        """
        text = (root / self.file).read_text()
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.file} has this {count} times, not once:\n{self.old}")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Mutation:
    """A rule that is broken.

    Attributes:
        name: What is broken.
        why: The rule, and how that breaks.
        edits: The changes.
        tests: Tests of `tests/cuda`, of which each must fail.
    """

    name: str
    why: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]


MUTATIONS = (
    Mutation(
        "tails before reads",
        "A receiver says that it is done with a message only when its stream has read it. Here it says so at once.",
        (
            Edit(
                "src/device/lower.rs",
                "        self.consumed[from.index()] = number;\n",
                "        self.consumed[from.index()] = number;\n"
                "        self.words.push(WordOperation::Release { from, number });\n",
            ),
        ),
        ("lanes::a_half_is_free_only_when_it_has_been_read",),
    ),
    Mutation(
        "no credits",
        "A sender writes to half its staging memory when the readers of the segment before the last are done. Here it "
        "does not wait.",
        (
            Edit(
                "src/device/counters.rs",
                "        let readers = before.iter_mut().enumerate().filter(|_| writes);\n",
                "        let readers = before.iter_mut().enumerate().filter(|_| writes && size_of::<u8>() > 1);\n",
            ),
        ),
        ("lanes::a_sender_that_is_ahead_leaves_what_is_still_to_be_read",),
    ),
    Mutation(
        "parity not counted on an idle rank",
        "Every rank counts every segment, so all agree on the half that it uses. Here those that send nothing do not.",
        (
            Edit(
                "src/device/counters.rs",
                "        let half = self.halves.take(phase);\n",
                "        let is_idle = program.sent.iter().all(|sent| sent.staged == 0);\n"
                "        let half = if is_idle { self.halves.clone().take(phase) } else { self.halves.take(phase) };\n",
            ),
        ),
        ("races::a_half_is_written_again_only_when_it_has_been_read",),
    ),
    Mutation(
        "failed after the stores",
        "A rank marks its failure before it releases its stream, which then computes nonsense that others read. Here "
        "it marks it afterwards, and is interrupted in between.",
        (
            Edit(
                "src/device/in_flight.rs",
                "        self.control.fail(&failure);\n",
                "        for (lane, words) in &state.awaits {\n"
                "            self.control.release(*lane, words.iter().copied());\n"
                "        }\n"
                "        std::thread::sleep(Duration::from_millis(150));\n"
                "        self.control.fail(&failure);\n",
            ),
        ),
        ("races::who_gives_up_spoils_no_success",),
    ),
    Mutation(
        "tokens without free",
        "In a graph a sender waits until its receivers have put their tokens back. Here it takes them in any case.",
        (
            Edit(
                "src/device/tokens.rs",
                "        self.awaited().map(|peer| Step::Token(WordAccess::Wait(self.outward(peer), 1)))\n",
                "        self.awaited().map(|peer| Step::Token(WordAccess::Wait(self.outward(peer), 0)))\n",
            ),
        ),
        ("races::a_replay_begins_when_a_slow_rank_has_received_the_one_before",),
    ),
    Mutation(
        "batch lowered message by message",
        "A batch takes a piece of every message in turn. Here it takes one message after the other, so ranks that send "
        "each other more than the cells hold wait in a circle.",
        (
            Edit(
                "src/device/rounds.rs",
                "        while !(sends.is_empty() && receives.is_empty()) {\n"
                "            lowering.advance(&mut sends, &mut chunks);\n"
                "            lowering.send(&chunks);\n"
                "            lowering.advance(&mut receives, &mut chunks);\n"
                "            lowering.receive(&chunks);\n"
                "        }\n",
                "        for message in sends.drain(..).chain(receives.drain(..)) {\n"
                "            let is_send = message.flow.direction == Direction::Send;\n"
                "            let mut left = vec![message];\n"
                "            while !left.is_empty() {\n"
                "                lowering.advance(&mut left, &mut chunks);\n"
                "                if is_send { lowering.send(&chunks) } else { lowering.receive(&chunks) }\n"
                "            }\n"
                "        }\n",
            ),
        ),
        ("messages::long_messages_go_both_ways_in_one_batch",),
    ),
    Mutation(
        "no chain within a pair",
        "A message comes after the one before in its direction, also if that is on another stream. Here it does not.",
        (
            Edit(
                "src/device/messages.rs",
                "            if end.last.is_some_and(|last| last != id) {\n",
                "            if end.last.is_some_and(|last| last != id) && false {\n",
            ),
        ),
        ("races::messages_come_in_the_order_of_the_calls",),
    ),
    Mutation(
        "split found per rank",
        "All ranks cut segments into leads and rests at the same place. Here those that send nothing to other hosts do "
        "it where it suits them.",
        (
            Edit(
                "src/device/lower.rs",
                "        let inward = *inward as usize;\n",
                "        let is_far = |to| !self.topo.same_host(me, to);\n"
                "        let away = |step: &Step| matches!(step.action, Action::Send { to, .. } if is_far(to));\n"
                "        let inward = if steps.iter().any(away) { *inward as usize } else { 0 };\n",
            ),
        ),
        ("hosts::ranks_of_several_hosts_do_every_collective",),
    ),
    Mutation(
        "a call that is not yet in the log",
        "A rank logs its call before it looks at those of others, so that of two ranks one finds the other's. Here it "
        "looks first, and is interrupted in between.",
        (
            Edit(
                "src/device/control.rs",
                "        call.publish(self.words.line(self.layout.call(self.me, lane, number)), number, store);\n"
                "        self.compare(lane, number, call, blocks)\n",
                "        let compared = self.compare(lane, number, call, blocks);\n"
                "        std::thread::sleep(std::time::Duration::from_millis(20));\n"
                "        call.publish(self.words.line(self.layout.call(self.me, lane, number)), number, store);\n"
                "        compared\n",
            ),
        ),
        ("races::ranks_that_disagree_at_once_all_know",),
    ),
    Mutation(
        "words without a fence",
        "A word is written once all before it can be seen. Here it may be seen first.",
        (Edit("src/sys/cuda/words.rs", "const WITH_BARRIER: u32 = 0;\n", "const WITH_BARRIER: u32 = 1;\n"),),
        ("races::a_half_is_free_only_after_the_copy",),
    ),
    Mutation(
        "no credits between hosts",
        "The network fills half of the pinned memory when the stream has read what lay there. Here it does not wait.",
        (
            Edit(
                "src/device/network.rs",
                "        Turn { half, sent, received, taken: self.before[half] }\n",
                "        Turn { half, sent, received, taken: self.before[half].min(0) }\n",
            ),
        ),
        ("races::hosts_are_at_different_segments",),
    ),
    Mutation(
        "no chain between streams",
        "The operations of a communicator come one after the other, also if they are on several streams. Here they do "
        "not.",
        (
            Edit(
                "src/device/executor.rs",
                "            stream.wait(current, &self.end)?;\n",
                "            let _ = &self.end;\n",
            ),
        ),
        ("pairwise::every_pair_of_values_goes_together",),
    ),
    Mutation(
        "an average of averages",
        "Where some ranks are alike, the average is that of all ranks. Here each group has its own.",
        (
            Edit(
                "src/comm/mixed.rs",
                "ReduceOp::PreMulSum(1.0 / self.size() as f64)",
                "ReduceOp::Avg",
            ),
        ),
        ("mixed::groups_may_differ_in_size",),
    ),
    Mutation(
        "a library before all have called",
        "Before a library moves data, all ranks have called the same. Here only those have that are alike.",
        (Edit("src/algo/islands.rs", "    agreement::confirm(builder, &setting.world());\n", ""),),
        ("mixed::libraries_serve_those_that_are_alike_and_the_host_the_rest",),
    ),
    Mutation(
        "who is alike is forgotten",
        "The failure of an operation by a library is no reason to decide again who is alike: it has ended well on "
        "other ranks. Here it is one.",
        (
            Edit(
                "src/comm/island.rs",
                "if matches!(result, Err(Error::Mismatch { detail, .. }) if detail.starts_with(RUN_OTHERWISE)) {",
                "if !RUN_OTHERWISE.is_empty() && result.is_err() {",
            ),
        ),
        ("mixed::what_hangs_in_a_library_ends_on_all_ranks_and_they_go_on",),
    ),
    Mutation(
        "an end before the device's",
        "An operation ends when the library has spread the result. Here it ends once that is on the stream.",
        (
            Edit(
                "src/comm/mixed.rs",
                "                END => self.wait_for_device(work, in_use),\n",
                "                END => Ok(()),\n",
            ),
        ),
        ("mixed::what_hangs_in_a_library_ends_on_all_ranks_and_they_go_on",),
    ),
)
