"""What Tandem is compared with: each contestant is a program of its own."""
