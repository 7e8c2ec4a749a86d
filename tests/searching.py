"""How long the stateful tests look: a few examples in a usual run, as many as one likes in a search.

``SMOOTHCTX_PROFILE=search SMOOTHCTX_EXAMPLES=5000 pytest tests/test_session_machine.py`` looks for new failures and
shows the first one as it was found, without shrinking it.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings


def machine_settings(*, examples: int, steps: int) -> settings:
    """Settings of a state machine."""
    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    if "SMOOTHCTX_EXAMPLES" in os.environ:
        chosen = settings(chosen, max_examples=int(os.environ["SMOOTHCTX_EXAMPLES"]), phases=(Phase.generate,))
    return chosen
