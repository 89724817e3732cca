"""What any drafter needs that calls a model level by level down a tree: plans, draws, a cache of its own."""
