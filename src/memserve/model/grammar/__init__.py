"""Grammars of answers, built and asked for masks in processes of their own."""
