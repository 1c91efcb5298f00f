"""Run the code blocks of README.md and docs/ as tests, and all tests with one thread inside operators."""

import os

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

# Before anything imports torch: operators on several threads, in several test processes, would wait for each other most
# of the time. What a test says about threads it sets itself.
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    patterns=["*.md"],
).pytest()
