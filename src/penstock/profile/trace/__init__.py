"""What every rank did, and when: recorded, put on one clock, and told."""

from penstock.profile.trace.trace import Trace as Trace
