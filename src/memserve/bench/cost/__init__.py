"""``memserve bench cost``: the cost model beside what it was not fitted to (MemServe 5.3 and figure 13)."""
