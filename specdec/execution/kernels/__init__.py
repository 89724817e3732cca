"""Triton kernels for what stands between the products of a forward, each beside the same in plain torch.

They round where the model's own operations round, so that little but the order of sums tells the two apart. Products
and sums in them are not contracted to one operation, which would round less. Nothing here reads a value on the device,
so that a launch can be captured in a graph.
"""
