"""Does a true caption score above an altered one? Word order, and swapped or replaced words."""
