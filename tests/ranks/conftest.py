"""What the ranks tests share."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "few", max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
settings.register_profile("thorough", parent=settings.get_profile("few"), max_examples=2000, derandomize=False)
if settings.get_current_profile_name() != "thorough":
    settings.load_profile("few")
