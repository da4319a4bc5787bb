"""Checks of a machine and a configuration, before anything is started."""

from isthmus_client.doctor.checks import check_all as check_all
from isthmus_client.doctor.findings import Finding as Finding
from isthmus_client.doctor.findings import Level as Level
from isthmus_client.doctor.findings import render_findings as render_findings
from isthmus_client.doctor.machine import examine as examine
