"""What a run would take: time, memory and disk, measured in a minute."""
