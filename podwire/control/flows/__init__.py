"""What packets did: events of the programs as flows, kept in a ring, sent to followers."""
