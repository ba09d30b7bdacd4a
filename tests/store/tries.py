"""How often Hypothesis tries, here and in a soak (NVRX_SOAK=1). Knows no store."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

SOAK = os.environ.get("NVRX_SOAK") == "1"
TIMEOUT_S = 3600 if SOAK else 240


def tries(usual: int, soak: int) -> settings:
    """The same examples in every usual run, new ones in each soak."""
    return settings(
        max_examples=soak if SOAK else usual,
        derandomize=not SOAK,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
