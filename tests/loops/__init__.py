"""Tests of long loops and of chains."""
