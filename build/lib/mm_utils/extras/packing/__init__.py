"""Captions in one row of tokens, without padding, in place of groups of about one length."""
