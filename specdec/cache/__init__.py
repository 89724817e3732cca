"""KV caches: one file per way of laying keys and values out in memory."""
