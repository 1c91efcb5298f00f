"""Tests of budgets in bytes."""
