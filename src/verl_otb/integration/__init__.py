"""Everything that knows verl: the table of hooks, how they are put in and taken out, and what each of them does."""
