"""Faults of caches with sliding windows and several groups, and of what the handshake compares.

They are looked for in the world that has such caches.
"""

from __future__ import annotations

from tests.mutants.edits import Constant, Edit, Mutant

WORLD = "groups"
FACTS = "kvferry.host.facts"
PUBLISHED = "kvferry.host.published"
COMPARE = "kvferry.layout.compare"

WINDOWS: tuple[Mutant, ...] = (
    Mutant(
        "window_begins_a_block_late",
        "6",
        "a producer holds a block less of a window than the last token looks at",
        (
            Edit(
                f"{PUBLISHED}:PublishedBlocks.__init__",
                old="table.first_needed(tokens - 1)",
                new="table.first_needed(tokens - 1) + bool(table.window_tokens)",
            ),
        ),
        world=WORLD,
    ),
    Mutant(
        "window_of_the_last_token_missed",
        "5",
        "a consumer receives all of a prompt, and with it the window of the token behind its last one",
        (
            Edit(
                f"{FACTS}:EngineFacts.received_stop",
                old="prompt_tokens - self.has_windows",
                new="prompt_tokens",
            ),
        ),
        world=WORLD,
    ),
    Mutant(
        "window_counted_from_the_hit",
        "5",
        "a consumer registers a window as if its own prefix hit were the end of the prompt",
        (
            Edit(
                f"{FACTS}:EngineFacts.needed_blocks",
                old="group.first_needed(stop)",
                new="group.first_needed(start)",
            ),
            Edit(
                "kvferry.protocol.slices:first_token",
                old="(stop + 1 - window_tokens)",
                new="(start + 1 - window_tokens)",
            ),
        ),
        world=WORLD,
    ),
    Mutant(
        "whole_range_of_a_window_sent",
        "5",
        "a window's blocks are published, registered and written from the first token on",
        (
            Edit(f"{FACTS}:CacheGroup.first_needed", old="if not self.window_tokens:", new="if True:"),
            Edit("kvferry.protocol.slices:first_token", old="if not window_tokens:", new="if True:"),
        ),
        world=WORLD,
    ),
    Mutant(
        "block_before_the_window_sent",
        "5",
        "both engines take a window for a block longer than it is",
        (
            Edit(
                f"{FACTS}:CacheGroup.first_needed",
                old="return max(stop + 1 - self.window_tokens, 0) // self.block_tokens",
                new="return max((stop + 1 - self.window_tokens) // self.block_tokens - 1, 0)",
            ),
            Edit(
                "kvferry.protocol.slices:first_token",
                old="(stop + 1 - window_tokens) // whole_tokens * whole_tokens",
                new="((stop + 1 - window_tokens) // whole_tokens - 1) * whole_tokens",
            ),
            Edit(
                "kvferry.protocol.producer_host:_lacking",
                old="(row.tokens - window) // tokens * tokens",
                new="((row.tokens - window) // tokens - 1) * tokens",
            ),
        ),
        world=WORLD,
    ),
    Mutant(
        "freed_window_block_sent",
        "3",
        "blocks that a window moves on from are published, and not held for who reads them",
        (
            Edit(f"{PUBLISHED}:PublishedBlocks.__init__", old="table.first_needed(tokens - 1)", new="0"),
            Edit(
                f"{PUBLISHED}:PublishedBlocks.advance",
                old="held += [block for block in blocks if block != _ABSENT]",
                new="held += []",
            ),
        ),
        world=WORLD,
    ),
    Mutant(
        "second_group_never_sent",
        "5",
        "of each slice only the first cache group is posted, and the rest is not waited for",
        (
            Edit(
                "kvferry.agent.posting:slice_runs",
                old="        if source\n",
                new="        if source and not group\n",
            ),
        ),
        world=WORLD,
    ),
    Mutant(
        "blocks_of_the_wrong_group",
        "5",
        "a consumer registers its block tables in another order than its cache groups have",
        (
            Edit(
                "kvferry.host.scheduler_consumer:SchedulerConsumer.allocated",
                old="tuple(map(to_spans, target)),",
                new="tuple(map(to_spans, target[::-1])),",
            ),
        ),
        world=WORLD,
    ),
    Mutant(
        "groups_counted_like_the_first",
        "5",
        "new blocks of every cache group are appended where those of the first one are",
        (
            Edit(
                "kvferry.protocol.commands:Advance.first_of",
                old="self.first_blocks[group] if self.first_blocks else",
                new="self.first_blocks[0] if self.first_blocks else",
            ),
        ),
        world=WORLD,
    ),
    Mutant(
        "part_of_a_window_used",
        "5",
        "after a failed receive an engine with windows goes on behind what has come",
        (
            Edit(
                f"{FACTS}:EngineFacts.keeps_good_prefixes",
                old="return len(self.groups) <= 1 and not self.has_windows",
                new="return True",
            ),
        ),
        world=WORLD,
    ),
    Mutant(
        "window_filled_in_part",
        "5",
        "windows go into blocks of which the producer has only the end",
        (
            Edit(
                f"{COMPARE}:_windows",
                old="if ours[0].window_tokens and source % target:",
                new="if False:",
            ),
        ),
        world=WORLD,
    ),
    Mutant(
        "windows_not_compared",
        "5",
        "caches with windows of unlike length are joined",
        (
            Constant(
                f"{COMPARE}:_GROUP_RULES",
                lambda rules: tuple(rule for rule in rules if rule.field != "window_tokens"),
            ),
        ),
        world=WORLD,
    ),
    Mutant(
        "models_not_compared",
        "5",
        "caches of unlike models are joined",
        (
            Constant(
                f"{COMPARE}:_CACHE_RULES",
                lambda rules: tuple(rule for rule in rules if rule.field != "model"),
            ),
        ),
        world=WORLD,
    ),
)
