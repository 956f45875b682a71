"""The raw operators, torch.ops.gradparity.*: what autograd, torch.func and fake tensors know of each.

One file per operator; csrc/schema.cpp lists their arguments.
"""
