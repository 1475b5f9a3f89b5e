"""Flags of other trainers, under their own names: what each is here.

    familiar_flag.py       the three ways to treat one: translated, idle, refused
    transformers_flags.py  transformers.TrainingArguments
    original_flags.py      the original AgentRL's configuration, and its scripts
    original_defaults.py   the values that flags have there if they are not given
    original_idle.py       flags that it takes together, although one of them has no effect

A flag that has the same name and meaning here is in none of these tables: it is a flag of a group.
docs/from-agentrl.md has all of them in one table, which is made from these.
"""

from collections.abc import Mapping

from agentrl.configs.familiar.familiar_flag import FamiliarFlag, Treatment, translate
from agentrl.configs.familiar.original_flags import ORIGINAL_FLAGS
from agentrl.configs.familiar.transformers_flags import TRANSFORMERS_FLAGS

FAMILIAR: Mapping[str, FamiliarFlag] = {**TRANSFORMERS_FLAGS, **ORIGINAL_FLAGS}

__all__ = ["FAMILIAR", "FamiliarFlag", "Treatment", "translate"]
