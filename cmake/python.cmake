# What CMake puts into the Python package, the install component "python": the libraries, beside the modules.

# Installs `library` and halfstep_io `io`, two paths, each as one real file, since a wheel holds no links. The second may be missing or empty:
# the package then cannot keep states in a file.
function(halfstep_install_python library io)
  add_custom_target(halfstep_python) # what a wheel needs to be built
  set(prefix ${CMAKE_SHARED_LIBRARY_PREFIX})
  if(WIN32)
    set(prefix "")
  endif()
  install(FILES ${library} DESTINATION halfstep COMPONENT python EXCLUDE_FROM_ALL
    RENAME ${prefix}halfstep${CMAKE_SHARED_LIBRARY_SUFFIX})
  if(io)
    install(FILES ${io} DESTINATION halfstep COMPONENT python EXCLUDE_FROM_ALL OPTIONAL
      RENAME ${prefix}halfstep_io${CMAKE_SHARED_LIBRARY_SUFFIX})
  endif()
endfunction()
