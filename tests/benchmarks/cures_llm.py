"""The experiments on a language model: RLOO, GRPO and what cures them."""

from cures_llm_steps import EXPERIMENTS as STEPS
from cures_llm_tokens import EXPERIMENTS as TOKENS

EXPERIMENTS = [*STEPS, *TOKENS]
