// c10d's Gloo header includes this file and uses nothing of it.
#pragma once
