"""Drawing tokens from logits (level 3): stateless, so that batch, preemption and migration change nothing."""
