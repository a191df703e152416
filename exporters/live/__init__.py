"""The page that `trainsentry serve` shows: bounded answers from the files of one run or many, over HTTP."""
