"""Two phases: prune first, which is free, and summarize only what is still too much."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lousho_ray.context.strategy import CompactionInput, CompactionOutput
from lousho_ray.context.summarize import SummarizeStrategy


@dataclass(frozen=True, slots=True)
class TwoPhaseStrategy:
    """Prunes, then lets `summarizing` work on the pruned conversation if it is still above the threshold."""

    summarizing: SummarizeStrategy
    name: str = "two-phase"

    async def compact(self, input: CompactionInput) -> CompactionOutput:
        pruning = self.summarizing.pruning
        pruned = pruning.prune(input, input.messages)
        if pruned.tokens_after <= input.threshold_tokens and not input.forced:
            return pruned
        held_back = self.summarizing.held_back(input, pruned.messages)
        done = await self.summarizing.summarize(input, pruned.messages)
        fell_back = done.error is not None or held_back
        return replace(
            done,
            tokens_before=pruned.tokens_before,
            pruned_tool_call_ids=pruned.pruned_tool_call_ids,
            applied=pruning.name if fell_back and pruned.pruned_tool_call_ids else None,
        )

    def foldable_tokens(self, input: CompactionInput) -> int:
        """What either phase could work on."""
        return max(self.summarizing.pruning.foldable_tokens(input), self.summarizing.foldable_tokens(input))
