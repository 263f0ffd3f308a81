"""What packets did: events of the programs as flows, kept in a ring, handed to followers."""
