"""Cutting a model by tracing its forward.

line      what was found, as a line of layers          tracer, proxy, context   how a forward is followed
how       where to cut: marks, names, or anywhere      call, state              kinds of call, train and eval
marks     cut points and blocks that are met           segments, inplace        what belongs together, what crosses
stage     one stage, and the program that it runs      members                  which layer has which parameter
"""
