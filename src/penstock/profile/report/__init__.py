"""The report page: where the time of a step goes, and what would make it shorter."""

from penstock.profile.report.page import write_report as write_report
