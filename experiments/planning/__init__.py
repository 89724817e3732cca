"""What a model will cost on a device, before anything is loaded: configurations, drafters, and a plan's figures."""
