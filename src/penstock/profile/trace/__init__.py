"""Records of ``Pipeline.trace``: their collection, statistics and files."""

from penstock.profile.trace.analysis import Trace as Trace
