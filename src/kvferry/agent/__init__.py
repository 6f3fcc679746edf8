"""One thread per rank that owns the transport and both protocol cores; a mailbox in, a mailbox out."""
