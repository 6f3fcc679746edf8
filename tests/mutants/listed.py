"""The faults that were planted with the checkers in mind, each a way in which such a protocol breaks."""

from __future__ import annotations

from tests.mutants.agent_side import AGENT_SIDE
from tests.mutants.consumer_side import CONSUMER_SIDE
from tests.mutants.edits import Mutant
from tests.mutants.producer_side import ENDINGS, POSTING
from tests.mutants.pull_side import PULL_SIDE
from tests.mutants.windows import WINDOWS

LISTED: tuple[Mutant, ...] = (*CONSUMER_SIDE, *POSTING, *ENDINGS, *PULL_SIDE, *AGENT_SIDE, *WINDOWS)
