"""Rate limits and budgets: pure arithmetic with an injected clock, and the forms of it that live in one process."""
