"""Parts for drafters that call a model level by level down a tree: plans, draws, a cache that follows the target."""
