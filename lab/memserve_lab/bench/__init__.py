"""Load on servers, its records, comparisons, reports."""
