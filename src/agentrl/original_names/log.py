"""`from log import logger`: a logger whose lines are in the sampler's log."""

import logging

logger = logging.getLogger("agentrl.user")

__all__ = ["logger"]
