"""The promotion ladder of a pair: what has to hold before a drafter is used with a target."""
