"""Cutting a model along its trunk, the list of blocks that its hidden state goes through, without tracing it.

line      the blocks, as a line of layers             run        one call of the model's own forward, in part
find      where the trunk is                          assembly   the containers of that call
layout    which stage has the parts around it         parts      what stands in for other stages' modules
source    before or after the trunk? the code says    blank      zeros in the place of values that others have
stage     one stage                                   calls      what is known of torch's functions
"""
