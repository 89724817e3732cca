"""Ways of running a model's forward: one file per executor, and the packed weights behind them."""
