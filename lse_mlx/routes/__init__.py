"""Which experts a target will read: guesses, tickets for them, and a simulated store that answers."""
