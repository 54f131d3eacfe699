"""``deepspeed.elasticity.elastic_agent``: the agent that starts ranks anew; here TorchElastic's own."""

from __future__ import annotations

from shoal.compat.absent import absent_class

DSElasticAgent = absent_class(
    "deepspeed.elasticity.elastic_agent.DSElasticAgent",
    "start the job by `shoal deepspeed --elastic_training`: TorchElastic's agent starts the ranks anew, and a"
    " checkpoint loads on any number of them.",
)

__all__ = ["DSElasticAgent"]
