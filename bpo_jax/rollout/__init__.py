"""Growing trees: the dialogue, the sampler, the branching rule and the rounds that join them."""
