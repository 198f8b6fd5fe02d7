"""Training of the small demo pair: teacher text, corpus, target, drafter."""
