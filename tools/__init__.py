"""Set-up, link checker, compatibility table; standard library only."""
