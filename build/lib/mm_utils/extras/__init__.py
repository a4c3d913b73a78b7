"""Named outskirts: each attaches by a door, the core imports none of them, and any can be deleted."""
